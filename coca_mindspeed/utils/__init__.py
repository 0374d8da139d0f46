"""Helpers without a subject: files, text formats, the terminal."""
