"""A UNet and a VAE decoder evaluated on active rows over cached features. Knows neither prompts nor schedulers."""
