"""What each side-car file promises, held against the graph."""
