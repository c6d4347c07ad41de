"""An agent with the OpenAI SDK. It takes its address and key from the environment, and knows nothing of training."""

import sys
from pathlib import Path

from openai import OpenAI

client = OpenAI()
word = sys.argv[1]
messages = [{"role": "user", "content": f"Reverse: {word}"}]
for attempt in range(2):
    answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    if len(answer.content or "") == len(word):
        break
    messages += [answer.model_dump(), {"role": "user", "content": f"Reverse: {word}"}]
Path("answer.txt").write_text(answer.content or "")
