// Recordings to a position. They go from the browser to the API and nowhere else; the answer is a page without scripts.
const TEXTS = ["frequency_mhz", "bandwidth_khz", "power_dbm"];

export default {
  template: `
    <form class="brim-upload" @submit.prevent="ask">
      <label class="brim-labelled">Recordings: KiwiSDR WAV, SigMF (data and metadata), or raw samples with their CSV
        <input type="file" name="files" multiple required></label>
      <label class="brim-labelled">Stations, unless the recordings say where they were made: CSV name,lat,lon,alt
        <input type="file" name="stations" accept=".csv"></label>
      <div class="brim-tools row">
        <label class="brim-labelled">Frequency, MHz<input name="frequency_mhz" inputmode="decimal" autocomplete="off"></label>
        <label class="brim-labelled">Bandwidth, kHz<input name="bandwidth_khz" inputmode="decimal" autocomplete="off"></label>
        <label class="brim-labelled">Power, dBm<input name="power_dbm" inputmode="decimal" autocomplete="off" placeholder="unknown"></label>
      </div>
      <div v-if="refusal" class="brim-error" role="alert">{{ refusal }}</div>
      <div v-if="status" class="brim-muted" role="status">{{ status }}</div>
      <div class="brim-tools row justify-end">
        <button v-if="page" type="button" class="brim-button" @click="download">Download GeoJSON</button>
        <button type="submit" class="brim-button brim-button-first" :disabled="isBusy">Locate</button>
      </div>
      <iframe v-if="page" :srcdoc="page" title="Position" sandbox="" class="brim-framed"></iframe>
    </form>`,
  data: () => ({ page: "", refusal: "", status: "", isBusy: false }),
  beforeUnmount() {
    this.asking?.abort();
  },
  methods: {
    async ask() {
      Object.assign(this, { page: "", refusal: "", status: "Measuring the recordings …", isBusy: true });
      const began = performance.now();
      try {
        this.page = await (await this.send("html")).text();
        this.status = `Located in ${((performance.now() - began) / 1000).toFixed(1)} s.`;
      } catch (failure) {
        Object.assign(this, { refusal: sentence(failure.message), status: "" });
      } finally {
        this.isBusy = false;
      }
    },
    async send(format) {
      const form = new FormData();
      for (const input of this.$el.querySelectorAll("input[type=file]"))
        for (const file of input.files) form.append(input.name, file, file.name);
      for (const name of TEXTS) {
        const text = this.$el.querySelector(`input[name=${name}]`).value.trim();
        if (text) form.append(name, text);
      }
      form.append("format", format);
      this.asking = new AbortController();
      let answer;
      try {
        answer = await fetch("/api/locate", { method: "POST", body: form, signal: this.asking.signal });
      } catch {
        throw new Error("the service does not answer; it may be starting again");
      }
      if (answer.ok) return answer;
      const { detail } = await answer.json().catch(() => ({ detail: `the service answered ${answer.status}` }));
      throw new Error(detail);
    },
    async download() {
      try {
        const blob = await (await this.send("geojson")).blob();
        const link = document.createElement("a");
        link.href = URL.createObjectURL(blob);
        link.download = "position.geojson";
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href), 60000);
      } catch (failure) {
        this.refusal = sentence(failure.message);
      }
    },
  },
};

function sentence(words) {
  return words.charAt(0).toUpperCase() + words.slice(1) + (/[.?!]$/.test(words) ? "" : ".");
}
