"""Text to ids and back: tokenizer, chat form, replies, streaming. No tensors."""
