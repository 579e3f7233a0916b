(function () {
  var svg = document.currentScript.closest("svg"), frames = Array.from(svg.querySelectorAll("g.frame"));
  function number(g, key) { return parseFloat(g.getAttribute("data-" + key)); }
  function show(chosen) {
    var x0 = number(chosen, "x"), w0 = number(chosen, "w"), d0 = number(chosen, "d"), tiny = 1e-9;
    frames.forEach(function (g) {
      var x = number(g, "x"), w = number(g, "w"), below = d0 > number(g, "d");
      var left = Math.max(0, (x - x0) / w0), right = Math.min(1, (x + w - x0) / w0);
      var out = tiny >= right - left;
      g.style.display = out ? "none" : "";
      g.classList.toggle("below", below);
      var rect = g.querySelector("rect"), text = g.querySelector("text"), wide = (right - left) * SPAN;
      rect.setAttribute("x", MARGIN + left * SPAN);
      rect.setAttribute("width", Math.max(0.3, wide - 0.5));
      text.setAttribute("x", MARGIN + left * SPAN + 4);
      var room = Math.floor((wide - 8) / LETTER), name = g.getAttribute("data-n");
      text.textContent = name.length > room ? (room > 2 ? name.slice(0, room - 1) + "\u2026" : "") : name;
    });
  }
  frames.forEach(function (g) { g.addEventListener("click", function () { show(g); }); });
})();
