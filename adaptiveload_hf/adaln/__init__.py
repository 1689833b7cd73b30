"""The model half: fused AdaLN operations and the patch that installs them. Never imports `buckets`."""
