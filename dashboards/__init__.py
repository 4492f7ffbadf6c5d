"""The web views: one file per view, the data of each apart from its figure; needs the extra `dashboard`.

In: an opened run. Out: a local web application. Nothing is computed here that a command could not print. All
state is in the link: what is clicked or brushed changes the link, and every section is filled from the link
alone, each by a request of its own.

    app, page                  the frame of all views, their registry, CSV; the components of views
    shown                      the state of a run that is shown; of one that is being recorded the latest
    links                      view, steps, ranks and times: to and from the query of a link
    loaded                     the Analysis that views ask, with the lanes to draw
    figures                    the figures of a run without a browser's views, for reports and notebooks
    theme, names               colours and the look of figures; names from traces, made harmless
    timeline/                  all lanes on one clock, drawn on a canvas, and as a figure
    chains                     boxes and arrows: which rank waits for which
    views/, whatif/            one module per view; edits and predictions
    report/                    a report as one page that needs nothing else
    server/                    where to listen, who may ask, and what a request may hold
    assets/                    style sheets, what only the browser can do, and the timeline's drawing
"""
