"""A request to a result: requests, plans, rendering and the pipeline of the three."""
