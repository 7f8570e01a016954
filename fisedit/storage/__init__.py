"""Pictures, their metadata and whole sessions on disk. Knows no model."""
