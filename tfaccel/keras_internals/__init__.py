"""All that relies on private parts of Keras and TensorFlow, or stands in for a layer of theirs."""
