"""Model families: the conditions that a UNet reads, and who encodes prompts into them."""
