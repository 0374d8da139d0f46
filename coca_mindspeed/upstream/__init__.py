"""Shared by the engines on other programs: source manifests, patches on import, waiting for a Ray cluster."""
