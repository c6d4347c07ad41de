"""Every option of a run: frozen models, one file a section."""
