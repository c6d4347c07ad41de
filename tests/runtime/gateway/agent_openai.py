"""An agent as people write them: the OpenAI SDK, a tool, several turns, streaming; it knows nothing of training."""

import asyncio
import json
import sys

from openai import AsyncOpenAI, OpenAI

LOOK = {
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": LOOK}]

client = OpenAI()
messages = [{"role": "user", "content": "what colour is the sky?"}]
first = client.chat.completions.create(model="gpt-x", messages=messages, tools=TOOLS)
message = first.choices[0].message
messages.append(message.model_dump())
for call in message.tool_calls:
    assert json.loads(call.function.arguments) == {"at": "sky"}
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "blue"})
second = client.chat.completions.create(model="gpt-x", messages=messages, tools=TOOLS)
print("chat:", second.choices[0].message.content)

stream = client.chat.completions.create(
    model="gpt-x",
    messages=[{"role": "user", "content": "stream"}],
    stream=True,
    stream_options={"include_usage": True},
)
print("stream:", "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices))


async def streamed() -> None:
    async with AsyncOpenAI().chat.completions.stream(
        model="gpt-x", messages=[{"role": "user", "content": "again"}], tools=TOOLS
    ) as events:
        final = await events.get_final_completion()
        print("async:", final.choices[0].message.tool_calls[0].function.name)


asyncio.run(streamed())

response = client.responses.create(model="gpt-x", instructions="be brief", input="hello")
print("response:", response.output_text)
response = client.responses.create(
    model="gpt-x", instructions="be brief", input="more", previous_response_id=response.id
)
print("next:", response.output_text)
with client.responses.stream(model="gpt-x", input="tool", tools=[{"type": "function", **LOOK}]) as events:
    (item,) = events.get_final_response().output
    print("responses stream:", item.type, item.name, item.arguments)
text = client.completions.create(model="gpt-x", prompt="once")
print("completion:", text.choices[0].text)
print("models:", client.models.list().data[0].id)
sys.exit(0)
