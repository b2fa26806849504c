"""What the commands of ``vime`` do, one module each, imported when that command runs."""
