"""What changes a UNet's feature maps: reference adapters and LoRAs, with one protocol to inject, scale and eject."""
