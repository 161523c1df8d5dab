"""Code that several commands share. runs.py reads stored runs, arguments.py has the options that choose runs,
tables.py makes tables, and looks.py has the name and the colour of each method."""
