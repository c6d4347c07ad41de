"""Do it: the asyncio shell around the core. It performs commands and reports events; it decides nothing."""
