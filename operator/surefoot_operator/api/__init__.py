"""The TrainingJob: `spec` and `status` as frozen dataclasses; `parse` turns YAML into them and back."""
