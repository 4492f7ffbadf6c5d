// Unpacks the drawing library, and draws each figure in its place.
(async () => {
  // Figures use the colours of the light theme; on a dark page each colour is replaced by its counterpart.
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  if (dark) document.documentElement.dataset.theme = "dark";
  const counterpart = JSON.parse(document.getElementById("dark").textContent);
  const coloured = (text) => (dark ? text.replace(/#[0-9a-f]{6}/g, (colour) => counterpart[colour] || colour) : text);
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), sign => sign.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
  const buttons = [["toImage"], ["zoom2d", "pan2d", "resetScale2d"]];
  const config = {displaylogo: false, responsive: true, showTips: false, plotlyServerURL: "", modeBarButtons: buttons};
  for (const place of document.querySelectorAll(".figure")) {
    place.style.height = `${place.dataset.height}px`;
    const {data, layout} = JSON.parse(coloured(place.nextElementSibling.textContent));
    await Plotly.newPlot(place, data, layout, config);
  }
  document.documentElement.dataset.drawn = "all";
})();
