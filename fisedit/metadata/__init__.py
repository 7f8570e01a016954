"""What image files say beside their pixels: how they were made, and their form. Knows no model."""
