"""Sessions on disk: a folder of images, masks, features and one index. Knows no model."""
