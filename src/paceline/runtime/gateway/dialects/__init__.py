"""The protocols that programs speak, one file each."""
