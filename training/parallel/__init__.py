"""Devices, meshes and what is exchanged between ranks."""
