"""The cost of an edit: operations counted, seconds predicted from a measured table."""
