"""Programs for the gateway's benchmark, with nothing but the standard library: a job a line in, `done` a line out."""

import asyncio
import json
import sys


async def program(url: str, secret: str, opening: int, turns: int, seen: int) -> None:
    """A conversation that sends its whole history each time, over one connection."""
    host, _, path = url.removeprefix("http://").partition("/")
    name, _, port = host.partition(":")
    reader, writer = await asyncio.open_connection(name, int(port), limit=2**26)
    messages = [{"role": "user", "content": "q" * opening}]
    for number in range(turns):
        body = json.dumps({"model": "m", "messages": messages}).encode()
        head = (
            f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {secret}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in answer.split(b"\r\n", 1)[0], answer
        lines = answer.decode().lower().split("\r\n")
        length = next(int(line[16:]) for line in lines if line.startswith("content-length:"))
        said = json.loads(await reader.readexactly(length))["choices"][0]["message"]
        messages += [said, {"role": "user", "content": f"{number:06d}" + "o" * (seen - 6)}]
    writer.close()


async def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        shape = job["opening"], job["turns"], job["seen"]
        await asyncio.gather(*[program(url, secret, *shape) for url, secret in job["endpoints"]])
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
