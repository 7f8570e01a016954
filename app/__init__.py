"""The app: iterative editing in a browser."""
