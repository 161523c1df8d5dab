"""One HTML page over any set of runs: table, curves, losses by length and position, configs compared, problems.

    reading.py    what the page shows of each run; groups.py: runs of the same config up to the seed
    tables.py     the tables; chart.py: the chart that is there without JavaScript; both from Python
    draw.js       draws a chart; page.js: which charts there are, the choice of runs, sorting
    page.py       the page, from all of them with page.html and page.css

The charts are our own because the page is to be one small file that needs no network: it has 0.2 MB for 14 runs, of
which 0.02 MB are JavaScript, the choice of runs, the means over seeds and the table included. plotly.min.js
(7.1.0) alone has 4.8 MB and Bokeh's 1.3 MB (3.9.2; 1.6 MB with its controls); either would replace some 190 of our
lines, the axes, lines and tooltips, and neither follows a browser's dark mode or draws the chart without JavaScript.
"""
