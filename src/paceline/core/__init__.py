"""What to decide: pure. Events and `now` in, commands out; no clock, no I/O, no asyncio, no hidden randomness."""
