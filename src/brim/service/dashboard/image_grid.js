// Thumbnails of a dataset of any size: only the rows in sight exist, and each image is asked for when its row is.
const PITCH = 168; // pixels of a cell with the gap, at least; cells grow to fill the width

export default {
  props: { place: String, items: Number, hasMasks: Boolean, job: String },
  template: `
    <div>
      <div class="brim-tools row">
        <label v-if="hasMasks" class="brim-check"><input type="checkbox" v-model="outlines"> {{ masksName }}</label>
        <label v-if="job" class="brim-check"><input type="checkbox" v-model="predicted"> Predicted outlines</label>
        <span class="brim-muted">{{ items.toLocaleString() }} images; choose one to see it large</span>
      </div>
      <div class="brim-thumbs" :style="{ height: Math.min(524, rows * pitch + 14) + 'px' }" ref="box" @scroll.passive="look" tabindex="0" role="group" aria-label="Images">
        <div :style="{ height: rows * pitch + 'px' }">
          <div class="brim-thumbs-row" v-for="row in shown" :key="row" :style="{ top: row * pitch + 'px', '--side': pitch - 8 + 'px' }">
            <button v-for="at in cells(row)" :key="at" type="button" class="brim-thumb" :aria-label="'Image ' + at" @click="open(at)">
              <img :src="source(at, 240)" :alt="'Image ' + at" width="160" height="160" loading="lazy">
            </button>
          </div>
        </div>
      </div>
      <div v-if="chosen !== null" class="brim-full" role="dialog" aria-modal="true" aria-label="Image" @keydown.esc="chosen = null"
        @keydown.left="step(-1)" @keydown.right="step(1)">
        <div class="brim-tools row brim-full-tools">
          <b>{{ name }}</b><span class="brim-muted">{{ facts }}</span>
          <label>Brightness <input type="range" min="20" max="400" v-model.number="brightness" aria-label="Brightness"></label>
          <label>Zoom <input type="range" min="25" max="800" v-model.number="zoom" aria-label="Zoom"></label>
          <label v-if="hasMasks" class="brim-check"><input type="checkbox" v-model="outlines" @change="read"> {{ masksName }}</label>
          <label v-if="job" class="brim-check"><input type="checkbox" v-model="predicted" @change="read"> Predicted outlines</label>
          <figure v-if="bars.length" class="brim-bars" :title="barsName">
            <svg :viewBox="'0 0 ' + bars.length + ' 1'" preserveAspectRatio="none" role="img" :aria-label="barsName">
              <rect v-for="(share, at) in bars" :key="at" :x="at + 0.06" :y="1 - share" width="0.88" :height="share"></rect>
            </svg>
            <figcaption class="brim-muted">{{ barsName }}</figcaption>
          </figure>
          <button type="button" class="brim-button" @click="step(-1)">Previous</button>
          <button type="button" class="brim-button" @click="step(1)">Next</button>
          <button type="button" class="brim-button" ref="close" @click="chosen = null">Close</button>
        </div>
        <div class="brim-full-stage"><img v-if="large" :src="large" :alt="name"
          :style="{ width: 'calc(min(100cqw, ' + aspect + ' * 100cqh) * ' + zoom / 100 + ')', filter: 'brightness(' + brightness + '%)', imageRendering: zoom > 200 ? 'pixelated' : 'auto' }"></div>
      </div>
    </div>`,
  data: () => ({ columns: 4, top: 0, height: 520, pitch: PITCH, outlines: true, predicted: true, bars: [], barsName: "", chosen: null, aspect: 1, large: "", name: "", facts: "", brightness: 100, zoom: 100 }),
  computed: {
    masksName() {
      return this.job ? "True outlines" : "Outlines";
    },
    rows() {
      return Math.ceil(this.items / this.columns);
    },
    shown() {
      const first = Math.max(0, Math.floor(this.top / this.pitch) - 1);
      const last = Math.min(this.rows - 1, Math.ceil((this.top + this.height) / this.pitch) + 1);
      return Array.from({ length: Math.max(0, last - first + 1) }, (_, at) => first + at);
    },
  },
  mounted() {
    this.observer = new ResizeObserver(() => this.look());
    this.observer.observe(this.$refs.box);
  },
  beforeUnmount() {
    this.observer?.disconnect();
    URL.revokeObjectURL(this.large);
  },
  methods: {
    look() {
      const { scrollTop, clientHeight, clientWidth } = this.$refs.box;
      const columns = Math.max(2, Math.floor((clientWidth - 8) / PITCH));
      Object.assign(this, { top: scrollTop, height: clientHeight, columns, pitch: Math.floor((clientWidth - 8) / columns) });
    },
    cells(row) {
      const first = row * this.columns;
      return Array.from({ length: Math.min(this.columns, this.items - first) }, (_, at) => first + at);
    },
    source(at, side) {
      const found = this.job && this.predicted ? `&job_id=${this.job}` : "";
      return `${this.place}/images/${at}?side=${side}&outlines=${this.outlines}${found}`;
    },
    async open(at) {
      Object.assign(this, { chosen: at, zoom: 100, brightness: 100 });
      await this.read();
      this.$refs.close?.focus();
    },
    step(by) {
      this.chosen = (this.chosen + by + this.items) % this.items;
      this.read();
    },
    async read() {
      const answer = await fetch(this.source(this.chosen, 1600));
      if (!answer.ok) {
        this.facts = (await answer.json().catch(() => ({}))).detail ?? `the service answered ${answer.status}`;
        return;
      }
      URL.revokeObjectURL(this.large);
      this.large = URL.createObjectURL(await answer.blob());
      this.name = decodeURIComponent(answer.headers.get("brim-image"));
      const objects = answer.headers.get("brim-objects");
      const sizes = JSON.parse(answer.headers.get("brim-sizes") ?? "null");
      const most = Math.max(...(sizes?.counts ?? [1]));
      this.bars = sizes && objects !== "1" ? sizes.counts.map((one) => one / most) : [];
      const ends = sizes && [sizes.edges[0], sizes.edges.at(-1)].map((one) => Math.round(one).toLocaleString());
      this.barsName = sizes ? `sizes: ${ends[0]} to ${ends[1]} pixels` : "";
      const [width, height] = answer.headers.get("brim-size").split("x").map(Number);
      this.aspect = width / height;
      const count = objects === "1" ? "1 object" : `${Number(objects).toLocaleString()} objects`;
      this.facts = `${width} × ${height} pixels` + (objects === null ? "" : `, ${count}`);
    },
  },
};
