// A map without tiles: land, coasts, borders, lines of latitude and longitude with their degrees, stations, points by colour.
// Points are drawn on a canvas, so that some thousands of them move with the map.
import { leaflet as L } from "nicegui-leaflet";

const STEPS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 45];
const LINES = 6; // of each direction, at most
const METRES = 111320; // of a degree of latitude
const CORNERS = 32; // of an ellipse

export default {
  props: { stations: Array, points: Array, errors: Array, land: Object, tileUrl: String, placing: Boolean, resourcePath: String },
  emits: ["pick", "place"],
  template: `<div></div>`,
  async mounted() {
    await this.$nextTick(); // until window.path_prefix is there
    await style(`${window.path_prefix}${this.resourcePath}/leaflet/leaflet.css`);
    if (this.isGone) return;
    const options = { renderer: L.canvas({ tolerance: 3 }), zoomSnap: 0.25, worldCopyJump: true };
    this.map = L.map(this.$el, { ...options, attributionControl: false, zoomControl: false, maxZoom: 18 });
    L.control.zoom({ position: "topright" }).addTo(this.map);
    this.fit();
    if (this.tileUrl) L.tileLayer(this.tileUrl, { maxZoom: 18 }).addTo(this.map);
    this.grid = L.layerGroup().addTo(this.map);
    this.map.on("moveend", () => this.drawGrid());
    this.drawGrid();
    this.coasts = L.layerGroup().addTo(this.map);
    this.drawLand(this.land);
    this.errors.forEach((one) => this.drawError(one));
    this.points.forEach((one) => this.drawPoint(one));
    this.markers = this.stations.map((one) => this.drawStation(one));
    this.map.on("zoomend", () => this.placeNames());
    this.placeNames();
    if (this.placing) this.map.on("click", ({ latlng }) => this.$emit("place", [latlng.lat, latlng.wrap().lng]));
    this.mark = L.circleMarker([0, 0], { radius: 9, color: "#d1383d", weight: 3, fill: false, interactive: false });
    this.heard = L.layerGroup().addTo(this.map);
    this.observer = new ResizeObserver(() => {
      this.map.invalidateSize();
      if (!this.isFitted) this.fit();
    });
    this.observer.observe(this.$el);
    if (this.marked) this.choose(...this.marked);
  },
  beforeUnmount() {
    this.isGone = true;
    this.observer?.disconnect();
    this.map?.remove();
  },
  methods: {
    // Once it has a size: it may be in a part of the page that is folded away.
    fit() {
      this.isFitted = this.$el.clientWidth > 0;
      if (this.isFitted) this.map.fitBounds(this.bounds(), { padding: [28, 28], maxZoom: 15 });
      else this.map.setView([0, 0], 1);
    },
    // Called by the page: other stations than before.
    setStations(stations, land) {
      this.markers?.forEach(({ marker }) => marker.remove());
      this.markers = stations.map((one) => this.drawStation(one));
      this.drawLand(land);
      const places = stations.map(({ lat, lon }) => [lat, lon]);
      if (!places.every((place) => this.map.getBounds().contains(place))) {
        this.map.fitBounds(L.latLngBounds(places).pad(0.02), { padding: [28, 28], maxZoom: 10 });
      }
      this.placeNames();
    },
    // Called by the page: a ring around one place, and around the receivers that heard it, joined to it.
    choose(lat, lon, heardBy) {
      this.marked = [lat, lon, heardBy];
      if (!this.map) return;
      this.mark.setLatLng([lat, lon]).addTo(this.map);
      this.heard.clearLayers();
      for (const one of heardBy) {
        const place = [one.lat, one.lon];
        L.polyline([[lat, lon], place], { color: "#d1383d", weight: 1.5, opacity: 0.7, interactive: false }).addTo(this.heard);
        const ring = { radius: 8, color: "#d1383d", weight: 2.5, fill: false, interactive: false };
        L.circleMarker(place, ring).addTo(this.heard);
      }
    },
    bounds() {
      const places = [
        ...this.stations.map(({ lat, lon }) => [lat, lon]),
        ...this.points.map(([lat, lon]) => [lat, lon]),
        ...this.errors.map(({ truth }) => truth),
      ];
      return places.length ? L.latLngBounds(places).pad(0.02) : [[-60, -180], [75, 180]];
    },
    drawLand(land) {
      this.coasts.clearLayers();
      if (this.tileUrl) return;
      L.polygon(land.areas, { stroke: false, fillColor: "#8a8d94", fillOpacity: 0.16, interactive: false, isLand: true }).addTo(this.coasts);
      for (const [isBorder, line] of land.lines) {
        const look = isBorder ? { weight: 1, dashArray: "4 3", opacity: 0.6 } : { weight: 1.3, opacity: 0.9 };
        L.polyline(line, { color: "#8a8d94", smoothFactor: 0.5, interactive: false, ...look }).addTo(this.coasts);
      }
    },
    drawStation({ name, lat, lon }) {
      const marker = L.circleMarker([lat, lon], { radius: 6, color: "#fff", weight: 2, fillColor: "#c2367e", fillOpacity: 1 });
      return { name, marker: marker.addTo(this.map) };
    },
    // Each name on the first side where no other is.
    placeNames() {
      const taken = [];
      for (const { name, marker } of this.markers) {
        const { x, y } = this.map.latLngToContainerPoint(marker.getLatLng());
        const [width, height] = [5.7 * name.length + 14, 18];
        const sides = {
          right: [x, y - height / 2],
          left: [x - width, y - height / 2],
          top: [x - width / 2, y - height - 10],
          bottom: [x - width / 2, y + 12],
        };
        const isFree = ([left, top]) =>
          taken.every((one) => left >= one[0] + one[2] || one[0] >= left + width || top >= one[1] + height || one[1] >= top + height);
        const direction = Object.keys(sides).find((side) => isFree(sides[side])) ?? "right";
        taken.push([...sides[direction], width]);
        const offset = { top: [0, -4], bottom: [0, 4] }[direction] ?? [0, 0];
        marker.unbindTooltip().bindTooltip(text(name), { permanent: true, direction, offset, className: "brim-station" });
      }
    },
    drawPoint([lat, lon, colour, words, index]) {
      const marker = L.circleMarker([lat, lon], { radius: 4, weight: 0, fillColor: colour, fillOpacity: 0.8 });
      marker.addTo(this.map).bindTooltip(() => text(words));
      marker.on("click", () => this.$emit("pick", index));
    },
    drawError({ truth, estimate, axes, azimuth, colour, words }) {
      if (axes) {
        const ring = ellipse(estimate, axes, azimuth);
        L.polygon(ring, { color: colour, weight: 1, opacity: 0.5, fillOpacity: 0.08, interactive: false }).addTo(this.map);
      }
      L.polyline([truth, estimate], { color: colour, weight: 1.5, interactive: false }).addTo(this.map);
      const dot = L.circleMarker(truth, { radius: 3, weight: 0, fillColor: colour, fillOpacity: 0.9 });
      dot.addTo(this.map).bindTooltip(() => text(words));
    },
    drawGrid() {
      this.grid.clearLayers();
      const seen = this.map.getBounds();
      const [south, north] = [Math.max(-85, seen.getSouth()), Math.min(85, seen.getNorth())];
      const [west, east] = [seen.getWest(), seen.getEast()];
      const line = { color: "#888", weight: 1, opacity: 0.35, interactive: false };
      for (const lat of places(south, north)) {
        L.polyline([[lat, west], [lat, east]], line).addTo(this.grid);
        if (lat - south > 0.08 * (north - south)) this.label([lat, west], degrees(lat, "N", "S"), [0, 8]);
      }
      for (const lon of places(west, east)) {
        L.polyline([[south, lon], [north, lon]], line).addTo(this.grid);
        this.label([south, lon], degrees(((lon + 540) % 360) - 180, "E", "W"), [-2, 18]);
      }
    },
    label(place, words, anchor) {
      const icon = L.divIcon({ className: "brim-degrees", html: words, iconSize: null, iconAnchor: anchor });
      L.marker(place, { icon, interactive: false, keyboard: false }).addTo(this.grid);
    },
  },
};

function places(from, to) {
  const step = STEPS.find((one) => (to - from) / one <= LINES) ?? STEPS.at(-1);
  const first = Math.ceil(from / step);
  return Array.from({ length: Math.floor(to / step) - first + 1 }, (_, at) => Number(((first + at) * step).toFixed(4)));
}

function degrees(value, positive, negative) {
  return `${Math.abs(Number(value.toFixed(4)))}° ${value >= 0 ? positive : negative}`;
}

// Flat around its middle: ellipses are small beside the Earth.
function ellipse([lat, lon], [major, minor], azimuth) {
  const [sin, cos] = [Math.sin((azimuth * Math.PI) / 180), Math.cos((azimuth * Math.PI) / 180)];
  const shrink = Math.max(0.01, Math.cos((lat * Math.PI) / 180));
  return Array.from({ length: CORNERS }, (_, at) => {
    const angle = (2 * Math.PI * at) / CORNERS;
    const [along, across] = [major * Math.cos(angle), minor * Math.sin(angle)];
    const [north, east] = [along * cos - across * sin, along * sin + across * cos];
    return [lat + north / METRES, lon + east / METRES / shrink];
  });
}

function text(words) {
  const made = document.createElement("span");
  made.textContent = words; // a name is no HTML
  return made;
}

function style(url) {
  if (document.querySelector(`link[href="${url}"]`)) return Promise.resolve();
  return new Promise((resolve) => {
    const link = Object.assign(document.createElement("link"), { rel: "stylesheet", href: url });
    link.onload = link.onerror = resolve;
    document.head.append(link);
  });
}
