"""Text to ids and back: tokenizer, chat template, reply parser, detokenizer. No tensors."""
