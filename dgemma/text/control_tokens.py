"""Names of the control tokens of the released vocabulary, and the marker of a hole in a file."""

BOS = "<bos>"
EOS = "<eos>"
TURN_END = "<turn|>"
THINK = "<|think|>"  # in a system turn: the reply may begin with a thought
CHANNEL = "<|channel>"
CHANNEL_END = "<channel|>"
TOOL_CALL = "<|tool_call>"
TOOL_CALL_END = "<tool_call|>"
TOOL_RESPONSE = "<|tool_response>"
IMAGE_BEGIN = "<|image>"
IMAGE_TOKEN = "<|image|>"  # a picture in the template's text; each soft token in the ids
IMAGE_END = "<image|>"
VIDEO_TOKEN = "<|video|>"  # a video in the template's text; each soft token of a frame in the ids
STRING_QUOTE = '<|"|>'  # around strings in a tool call
FILL_MARK = "<|fill|>"  # plain text in files that readers split on; never a token
