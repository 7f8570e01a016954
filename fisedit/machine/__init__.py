"""The machine: device, hardware, memory, and time by stage. Knows torch and no model."""
