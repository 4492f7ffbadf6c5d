"""The web views: one file per view, the data of each apart from its figure; needs the extra `dashboard`.

In: an opened run. Out: a local web application. Nothing is computed here that a command could not print. All
state is in the link: what is clicked or brushed changes the link, and every section is filled from the link
alone, each by a request of its own.

    serve, guard, bodies            where to listen; who may ask, and what a page may load; what a request may
                                    ask
    app, page                       the frame of all views, their registry, CSV; what views are made of
    shown                           the state of a run that is shown; of one that is being recorded the latest
    links                           which view, steps, ranks and times: to and from the query of a link
    loaded                          the Analysis that views ask, with what there is to draw
    figures                         the figures of a run without a browser's views, for reports and notebooks
    report, report.html, report.js  a report as one page that needs nothing else
    theme, names                    colours and the look of figures; names from traces, made harmless
    assets/                         the style sheet, and what only the browser can do
    verdict                         healthy or not, what is slow, what would help, how far to believe it
    heatmap, breakdown              a value per rank and step; where the time of steps went
    collectives, kernels            transfers by size with the fitted lines, who comes last; a table of what
                                    takes the time
    telemetry                       sampled values, on the time axis of the timeline
    workbench, limits, tries        edits, what they would give, and what they change on the critical path;
                                    what each part of the machine is worth; the ledger
    waterfall                       what adds up to a difference
    hang, chains                    who waits for whom in a job that stands still, and how far each rank had
                                    come
    roofline                        what matmuls reach of what their GPU can do
    matrix                          what pairs of ranks and hosts take; who waits for whom in collectives
    difference                      what explains that another run is faster or slower
    timeline, segments, spans       all lanes on one clock; what of them a screen can show; one span and what
                                    it waited for
"""
