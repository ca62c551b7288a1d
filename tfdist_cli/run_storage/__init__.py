"""Run directories in storage services: uploaded while a run is on, downloaded to resume it and to read it."""
