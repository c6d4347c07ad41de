"""An agent of a framework, unmodified: pydantic-ai with a tool."""

from pydantic_ai import Agent

agent = Agent("openai-chat:gpt-x", instructions="be brief")


@agent.tool_plain
def look(at: str) -> str:
    """Look at something."""
    return "blue" if at == "sky" else "nothing"


print("agent:", agent.run_sync("what colour is the sky?").output)
