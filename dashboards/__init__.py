"""The web views: one file per view, with data separate from figures; needs the extra `dashboard`.

In: an opened run, and others to choose from. Out: a local web application. Nothing is computed here that a
command could not print. All state is in the link: clicks and selections change the link, and every section
is rendered from the link alone, each by its own request.

    app, page                  the frame of all views, their registry, CSV; the components of views
    runs, shown                the runs that a link can name; one run, while it is recorded its latest copy
    links                      view, runs, steps, ranks and times: to and from the query of a link
    needs                      what each view needs of a run, and the sentence where a run lacks it
    loaded                     the Analysis behind the views, with the lanes to draw
    figures                    the figures of a run for reports and notebooks
    theme, names               colours and the look of figures; escaping of names from traces
    timeline/                  all lanes on one clock, drawn on a canvas, and as a figure
    order                      the order of ranks in views: by number, or grouped by an axis
    chains                     a diagram of which ranks wait for which
    views/, whatif/, fabric/   one module per view; edits and predictions; the network
    report/                    a report as one self-contained page
    server/                    listening, access control, and validation of requests
    assets/                    style sheets, scripts, and the drawing of the timeline
"""
