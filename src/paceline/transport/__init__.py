"""Batches out, weights in: the wire format, the file transport, and the reader for any trainer."""
