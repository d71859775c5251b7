"""Models of other libraries and plain torch, computed by the ops of this package."""
