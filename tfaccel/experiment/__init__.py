"""An experiment that a config file describes: its data, model, recipe, training and export."""
