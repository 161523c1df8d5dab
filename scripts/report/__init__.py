"""One HTML page over any set of runs: table, curves, losses by length and position, configs compared, problems.

    reading.py    what the page shows of each run; groups.py: runs of the same config up to the seed
    tables.py     the tables; charts.py: the charts, drawn by matplotlib
    page.py       the page, from these with page.html, page.css and page.js, which sorts, filters and hides

The charts are SVG inside the page, so that it is one small file that needs no network (0.3 MB for 14 runs) and shows
everything without JavaScript too. A plotting library in the page, which could zoom, would make each page larger by
1.3 MB (Bokeh 3.9.2) or 4.8 MB (plotly.min.js 7.1.0): for other axes, make a page of some of the runs.
"""
