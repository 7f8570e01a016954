"""Images, their metadata and sessions on disk. Knows no model."""
