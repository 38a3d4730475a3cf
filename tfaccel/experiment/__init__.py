"""An experiment from a config file: its data, model, recipe, training and export."""
