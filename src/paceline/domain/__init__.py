"""What things are: frozen records and nothing else. Imports only `paceline.errors`, msgspec and numpy.

Records are `msgspec.Struct`s: about five times cheaper to build than frozen dataclasses, and the journal
writes them as they are. `gc=False` is safe because no record can be part of a reference cycle; it keeps the
garbage collector from walking millions of them.
"""
