"""The same with the Anthropic SDK."""

from anthropic import Anthropic

LOOK = {
    "name": "look",
    "description": "Look.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
client = Anthropic()
messages = [{"role": "user", "content": "what colour is the sky?"}]
first = client.messages.create(
    model="claude-x", max_tokens=100, system="be brief", messages=messages, tools=[LOOK]
)
assert first.stop_reason == "tool_use", first
results = [
    {"type": "tool_result", "tool_use_id": block.id, "content": "blue"}
    for block in first.content
    if block.type == "tool_use" and block.input == {"at": "sky"}
]
messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
with client.messages.stream(
    model="claude-x", max_tokens=100, system="be brief", messages=messages, tools=[LOOK]
) as stream:
    print("stream:", "".join(stream.text_stream))
    final = stream.get_final_message()
print("stop:", final.stop_reason, final.usage.output_tokens)
with client.messages.stream(max_tokens=100, model="claude-x", messages=messages[:1], tools=[LOOK]) as stream:
    for block in stream.get_final_message().content:
        print("call:", block.name, block.input)
print("count:", client.messages.count_tokens(model="claude-x", messages=messages[:1]).input_tokens > 10)
