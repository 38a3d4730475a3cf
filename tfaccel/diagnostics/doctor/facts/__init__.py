"""What there is: gathered, not judged. Each file gives plain values that a test can plant."""
