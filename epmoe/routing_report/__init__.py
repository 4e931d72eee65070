"""`epmoe routing FILE`: what a router's choices cost, and which interface to use."""
