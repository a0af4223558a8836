// An image with the polygons that a model finds in it. The image goes from the browser to the API and nowhere else.
const DEBOUNCE_MS = 250;
const LISTED = 200;
const TRIES = 40; // while a model is being loaded
const NAMES = { geojson: (stem) => `${stem}.geojson`, roi: (stem) => `${stem}_rois.zip`, coco: (stem) => `${stem}_coco.json` };

export default {
  props: { model: String, threshold: Number, detectHoles: Boolean },
  template: `
    <div class="brim-bring">
      <label class="brim-drop" :class="{ 'brim-drop-over': isOver }"
        @dragover.prevent="isOver = true" @dragleave="isOver = false" @drop.prevent="take($event.dataTransfer.files)">
        <span><b>Drop an image here</b>, or choose one: PNG, JPEG, TIFF, BMP, GIF, WebP, JPEG 2000 or PPM</span>
        <input type="file" aria-label="Image" @change="take($event.target.files)"
          accept="image/*,.tif,.tiff,.jp2,.ppm,.pgm,.bmp">
      </label>
      <div v-if="refusal" class="brim-error" role="alert">{{ refusal }}</div>
      <div v-if="file" class="brim-muted" role="status">{{ status }}</div>
      <div v-if="file && size" class="brim-split">
        <div>
          <div class="brim-stage" :style="{ aspectRatio: size[0] + ' / ' + size[1] }">
            <img v-if="canShow" :src="url" :alt="file.name"
              :style="{ imageRendering: size[0] < 600 ? 'pixelated' : 'auto' }">
            <svg :viewBox="'0 0 ' + size[0] + ' ' + size[1]" preserveAspectRatio="none" role="group" aria-label="Polygons"
              @mouseover="hover" @mouseout="chosen = null" @focusin="hover" @focusout="chosen = null">
              <path v-for="(one, at) in polygons" :key="at" :d="one.path" :data-at="at" tabindex="0" role="img"
                :aria-label="words(one, at)" fill-rule="evenodd" :class="{ 'brim-chosen': chosen === at }"></path>
            </svg>
            <div v-if="chosen !== null && polygons[chosen]" class="brim-tip" :style="tipPlace" role="tooltip">
              {{ words(polygons[chosen], chosen) }}
            </div>
          </div>
          <div v-if="!canShow" class="brim-muted">Browsers do not show images of this type: the ground is left empty.</div>
        </div>
        <div class="brim-found">
          <div class="brim-tools row">
            <button v-for="(name, format) in formats" :key="format" type="button" class="brim-button"
              :disabled="!found" @click="download(format)">{{ name }}</button>
          </div>
          <div class="brim-found-list">
            <table aria-label="Polygons">
              <thead><tr><th>Polygon</th><th>Area, pixels</th><th>Confidence</th></tr></thead>
              <tbody>
                <tr v-for="one in listed" :key="one.at" tabindex="0" :class="{ 'brim-chosen': chosen === one.at }"
                  @mouseenter="chosen = one.at" @mouseleave="chosen = null" @focus="chosen = one.at" @blur="chosen = null">
                  <td>{{ one.at + 1 }}</td><td>{{ one.area.toLocaleString() }}</td><td>{{ percent(one.confidence) }}</td>
                </tr>
              </tbody>
            </table>
            <div v-if="polygons.length > listed.length" class="brim-muted">
              The {{ listed.length }} largest of {{ polygons.length }}.
            </div>
          </div>
        </div>
      </div>
    </div>`,
  data: () => ({
    file: null,
    url: "",
    size: null, // width and height of the stored pixels
    canShow: true,
    found: null, // the answer's text
    polygons: [],
    chosen: null,
    refusal: "",
    status: "",
    isOver: false,
    formats: { geojson: "Download GeoJSON", roi: "ImageJ ROI", coco: "COCO" },
  }),
  computed: {
    listed() {
      return [...this.polygons].sort((one, other) => other.area - one.area).slice(0, LISTED);
    },
    tipPlace() {
      const [x, y] = this.polygons[this.chosen].top;
      return { left: `clamp(122px, ${(100 * x) / this.size[0]}%, 100% - 122px)`, top: `${(100 * y) / this.size[1]}%`, "--below": y < 0.12 * this.size[1] ? 1 : 0 };
    },
  },
  watch: {
    model: "askSoon",
    threshold: "askSoon",
    detectHoles: "askSoon",
  },
  beforeUnmount() {
    this.asking?.abort();
    clearTimeout(this.soon);
    if (this.url) URL.revokeObjectURL(this.url);
  },
  methods: {
    async take(files) {
      this.isOver = false;
      if (!files.length) return;
      if (this.url) URL.revokeObjectURL(this.url);
      Object.assign(this, { file: files[0], polygons: [], found: null, size: null, chosen: null, refusal: "" });
      this.url = URL.createObjectURL(this.file);
      const image = new Image();
      image.style.imageOrientation = "none"; // polygons belong to the pixels as they are stored
      image.src = this.url;
      this.shown = image.decode().then(
        () => [image.naturalWidth, image.naturalHeight],
        () => null,
      );
      await this.ask();
    },
    askSoon() {
      clearTimeout(this.soon);
      if (this.file) this.soon = setTimeout(() => this.ask(), DEBOUNCE_MS);
    },
    async ask() {
      this.asking?.abort();
      const own = (this.asking = new AbortController());
      this.status = `${this.file.name}: looking for objects …`;
      try {
        const answer = await this.send("geojson", own.signal);
        const text = await answer.text();
        const size = await this.measure(own.signal);
        if (own.signal.aborted) return;
        Object.assign(this, { found: text, size, polygons: read(text), chosen: null, refusal: "" });
        const model = answer.headers.get("brim-model");
        this.status = `${this.file.name}: ${count(this.polygons.length)} by ${model} in ${took(answer)}`;
      } catch (failure) {
        if (own.signal.aborted) return;
        Object.assign(this, { found: null, polygons: [], status: "", refusal: sentence(failure.message) });
      }
    },
    async measure(signal) {
      const shown = await this.shown;
      this.canShow = shown !== null;
      if (shown) return shown;
      const { images } = await (await this.send("coco", signal)).json(); // it says how large the image is
      return [images[0].width, images[0].height];
    },
    async send(format, signal) {
      for (let tries = 0; ; tries++) {
        const form = new FormData();
        form.append("file", this.file, this.file.name);
        form.append("model", this.model);
        form.append("threshold", this.threshold);
        form.append("detect_holes", this.detectHoles);
        form.append("format", format);
        let answer;
        try {
          answer = await fetch("/api/segment", { method: "POST", body: form, signal });
        } catch (failure) {
          throw signal?.aborted ? failure : new Error("the service does not answer; it may be starting again");
        }
        if (answer.ok) return answer;
        const { detail } = await answer.json().catch(() => ({ detail: `the service answered ${answer.status}` }));
        const wait_s = Number(answer.headers.get("retry-after"));
        if (answer.status !== 503 || !wait_s || tries >= TRIES) throw new Error(detail);
        this.status = `${sentence(detail)} Trying again …`;
        await new Promise((resolve) => setTimeout(resolve, 1000 * Math.min(wait_s, 5)));
        signal?.throwIfAborted();
      }
    },
    async download(format) {
      try {
        const type = "application/geo+json";
        const blob = format === "geojson" ? new Blob([this.found], { type }) : await (await this.send(format)).blob();
        const link = document.createElement("a");
        link.href = URL.createObjectURL(blob);
        link.download = NAMES[format](this.file.name.replace(/\.[^.]*$/, "") || "image");
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href), 60000);
      } catch (failure) {
        this.refusal = sentence(failure.message);
      }
    },
    hover(event) {
      const at = event.target.dataset?.at;
      this.chosen = at === undefined ? null : Number(at);
    },
    words(one, at) {
      return `Polygon ${at + 1}: ${one.area.toLocaleString()} pixels, confidence ${this.percent(one.confidence)}`;
    },
    percent: (value) => `${(100 * value).toFixed(1)} %`,
  },
};

function read(text) {
  return JSON.parse(text).features.map(({ geometry, properties }, at) => {
    const rings = geometry.coordinates;
    const top = rings[0].reduce((best, point) => (point[1] < best[1] ? point : best));
    const { area_px: area, confidence } = properties.measurements;
    return { at, top, area, confidence, path: rings.map((ring) => `M${ring.map((point) => point.join(" ")).join("L")}Z`).join("") };
  });
}

function took(answer) {
  const total = /total;dur=([\d.]+)/.exec(answer.headers.get("server-timing") ?? "");
  return total ? `${Math.round(Number(total[1]))} ms` : "no time";
}

const count = (number) => (number === 1 ? "1 polygon" : `${number.toLocaleString()} polygons`);
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.?!…]$/.test(text) ? "" : ".");
