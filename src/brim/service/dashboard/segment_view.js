// An image with the polygons that a model finds in it. The image goes from the browser to the API and nowhere else.
const DEBOUNCE_MS = 120;
const LISTED = 200;
const BARS = 24; // of the histogram of sizes
const TRIES = 40; // while a model is being loaded
const NAMES = { geojson: (stem) => `${stem}.geojson`, roi: (stem) => `${stem}_rois.zip`, coco: (stem) => `${stem}_coco.json`, labels: (stem) => `${stem}_labels.tif`, csv: (stem) => `${stem}.csv` };

export default {
  props: { model: String, threshold: Number, detectHoles: Boolean, minArea: Number, resourcePath: String },
  template: `
    <div class="brim-upload">
      <label class="brim-drop" :class="{ 'brim-drop-over': isOver }"
        @dragover.prevent="isOver = true" @dragleave="isOver = false" @drop.prevent="take($event.dataTransfer.files)">
        <span><b>Drop an image here</b>, or choose one: PNG, JPEG, TIFF, BMP, GIF, WebP, JPEG 2000 or PPM</span>
        <input type="file" aria-label="Image" @change="take($event.target.files)"
          accept="image/*,.tif,.tiff,.jp2,.ppm,.pgm,.bmp">
      </label>
      <div v-if="!file" class="brim-empty column">
        <h2>No image yet</h2>
        <div>Drop one above, or choose it: its objects are outlined and counted, and can be downloaded as polygons, labels or a table.
          The image goes to this service and is not kept.</div>
        <button type="button" class="brim-button q-mt-sm" @click="tryExample">Try it on drawn cells</button>
      </div>
      <div v-if="refusal" class="brim-error" role="alert">{{ refusal }}</div>
      <div v-if="file" class="brim-muted" role="status">{{ status }}</div>
      <div v-if="file && size" class="brim-split">
        <div>
          <div class="brim-stage" :style="{ aspectRatio: size[0] + ' / ' + size[1] }">
            <img v-if="canShow" :src="url" :alt="file.name"
              :style="{ imageRendering: size[0] < 600 ? 'pixelated' : 'auto' }">
            <svg :viewBox="'0 0 ' + size[0] + ' ' + size[1]" preserveAspectRatio="none" role="group" aria-label="Polygons"
              @mouseover="hover" @mouseout="chosen = null" @focusin="hover" @focusout="chosen = null">
              <path v-for="one in kept" :key="one.at" :d="one.path" :data-at="one.at" tabindex="0" role="img"
                :style="{ '--hue': one.hue }"
                :aria-label="words(one, one.at)" fill-rule="evenodd" :class="{ 'brim-chosen': chosen === one.at }"></path>
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
          <figure v-if="kept.length > 1" class="brim-sizes">
            <figcaption class="brim-muted">{{ sizes }}</figcaption>
            <svg :viewBox="'0 0 ' + bars.length + ' 1'" preserveAspectRatio="none" role="img" :aria-label="sizes">
              <rect v-for="(bar, at) in bars" :key="at" :x="at + 0.06" :y="1 - bar.share" width="0.88" :height="bar.share">
                <title>{{ bar.words }}</title>
              </rect>
            </svg>
            <div class="brim-sizes-ends brim-muted"><span>{{ bars[0].from }}</span><span>area, pixels</span><span>{{ bars[bars.length - 1].to }}</span></div>
          </figure>
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
            <div v-if="kept.length > listed.length" class="brim-muted">
              The {{ listed.length }} largest of {{ kept.length }}.
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
    formats: { geojson: "Download GeoJSON", labels: "Labels", csv: "CSV", roi: "ImageJ ROI", coco: "COCO" },
  }),
  computed: {
    kept() {
      return this.polygons.filter((one) => one.area >= this.minArea);
    },
    bars() {
      const areas = this.kept.map((one) => one.area).sort((one, other) => one - other);
      const [low, high] = [areas[0], areas[areas.length - 1] + 1];
      const bounds = Array.from({ length: BARS + 1 }, (_, at) => low + ((high - low) * at) / BARS);
      const counts = Array(BARS).fill(0);
      for (const area of areas) counts[Math.min(BARS - 1, Math.floor((BARS * (area - low)) / (high - low)))]++;
      const most = Math.max(...counts);
      return counts.map((number, at) => {
        const [from, to] = [Math.round(bounds[at]).toLocaleString(), Math.round(bounds[at + 1]).toLocaleString()];
        return { from, to, share: number / most, words: `${from} to ${to} pixels: ${count(number)}` };
      });
    },
    sizes() {
      const areas = this.kept.map((one) => one.area).sort((one, other) => one - other);
      const median = areas[Math.floor(areas.length / 2)];
      const diameter = 2 * Math.sqrt(median / Math.PI);
      return `${count(areas.length)}, median ${median.toLocaleString()} pixels: ${diameter.toFixed(1)} across`;
    },
    listed() {
      return [...this.kept].sort((one, other) => other.area - one.area).slice(0, LISTED);
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
    minArea: "tell",
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
    async tryExample() {
      try {
        const answer = await fetch(`${window.path_prefix}${this.resourcePath}/image.webp`);
        if (!answer.ok) throw new Error(`the service answered ${answer.status}`);
        await this.take([new File([await answer.blob()], "drawn cells.webp", { type: "image/webp" })]);
      } catch (failure) {
        this.refusal = sentence(failure.message);
      }
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
        this.answered = `by ${model} in ${took(answer)}`;
        this.tell();
      } catch (failure) {
        if (own.signal.aborted) return;
        Object.assign(this, { found: null, polygons: [], status: "", refusal: sentence(failure.message) });
      }
    },
    tell() {
      const left = this.polygons.length - this.kept.length;
      const small = left ? `, ${left.toLocaleString()} smaller ones left out` : "";
      if (this.found) this.status = `${this.file.name}: ${count(this.kept.length)}${small} ${this.answered}`;
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
        if (format !== "geojson" && this.minArea) form.append("min_area", this.minArea);
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
        if (answer.status !== 503 || !wait_s || tries >= TRIES)
          throw new Error(detail.replace('"GET /api/models" lists', "the list above has"));
        this.status = `${sentence(detail)} Trying again …`;
        await new Promise((resolve) => setTimeout(resolve, 1000 * Math.min(wait_s, 5)));
        signal?.throwIfAborted();
      }
    },
    async download(format) {
      try {
        const type = "application/geo+json";
        const blob = format === "geojson" ? new Blob([this.chosenText()], { type }) : await (await this.send(format)).blob();
        const link = document.createElement("a");
        link.href = URL.createObjectURL(blob);
        link.download = NAMES[format](this.file.name.replace(/\.[^.]*$/, "") || "image");
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href), 60000);
      } catch (failure) {
        this.refusal = sentence(failure.message);
      }
    },
    chosenText() {
      if (this.kept.length === this.polygons.length) return this.found;
      const all = JSON.parse(this.found);
      return JSON.stringify({ ...all, features: this.kept.map((one) => all.features[one.at]) });
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
    const hue = Math.round((at * 222.492) % 360); // steps of the golden ratio: neighbours differ
    return { at, hue, top, area, confidence, path: rings.map((ring) => `M${ring.map((point) => point.join(" ")).join("L")}Z`).join("") };
  });
}

function took(answer) {
  const total = /total;dur=([\d.]+)/.exec(answer.headers.get("server-timing") ?? "");
  return total ? `${Math.round(Number(total[1]))} ms` : "no time";
}

const count = (number) => (number === 1 ? "1 polygon" : `${number.toLocaleString()} polygons`);
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.?!…]$/.test(text) ? "" : ".");
