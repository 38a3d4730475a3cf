"""Facts about the machine, without a judgement. They are plain values that a test can make up."""
