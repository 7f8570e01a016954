"""Adapters that change a UNet's feature maps, and LoRAs, with one protocol to inject, scale and eject."""
