// A form that sends files to the API as they are, and shows how much was sent.
export default {
  emits: ["uploaded", "leave"],
  template: `
    <form class="brim-upload" @submit.prevent="send">
      <label class="brim-labelled">Name<input v-model.trim="name" required maxlength="200" autocomplete="off"></label>
      <label class="brim-labelled">Kind
        <select v-model="kind"><option value="images">Images</option><option value="sequences">Sequences</option><option value="recordings">Recordings</option></select>
      </label>
      <template v-if="kind === 'images'">
        <label class="brim-labelled">Images
          <input type="file" name="images" multiple required accept="image/*,.tif,.tiff,.jp2,.ppm,.pgm"></label>
        <label class="brim-labelled">Masks, to train on: none, or one of the same name for every image
          <input type="file" name="masks" multiple accept="image/*,.tif,.tiff"></label>
      </template>
      <template v-else-if="kind === 'recordings'">
        <label class="brim-labelled">Recordings of receivers, and stations.csv where they do not say where they were made
          <input type="file" name="recordings" multiple required></label>
      </template>
      <template v-else>
        <label class="brim-labelled">Sequences: .npy files of frames × features, tables, archives or audio
          <input type="file" name="sequences" multiple required
                 accept=".npy,.npz,.csv,.parquet,.ts,.arff,.tsv,.wav,.flac,.ogg"></label>
        <label class="brim-labelled">Labels: none, or a CSV with the columns file and label
          <input type="file" name="labels" accept=".csv"></label>
      </template>
      <div v-if="refusal" class="brim-error" role="alert">{{ refusal }}</div>
      <progress v-if="share !== null" :value="share" max="1" aria-label="Sent" class="brim-wide-bar"></progress>
      <div class="brim-tools row justify-end">
        <button type="button" class="brim-button" @click="leave">Cancel</button>
        <button type="submit" class="brim-button brim-button-first" :disabled="share !== null">Upload</button>
      </div>
    </form>`,
  data: () => ({ name: "", kind: "images", refusal: "", share: null }),
  beforeUnmount() {
    this.request?.abort();
  },
  methods: {
    send() {
      const form = new FormData();
      form.append("name", this.name);
      form.append("kind", this.kind);
      for (const input of this.$el.querySelectorAll("input[type=file]"))
        for (const file of input.files) form.append(input.name, file, file.name);
      const request = (this.request = new XMLHttpRequest()); // fetch does not say how much was sent
      request.open("POST", "/api/datasets");
      request.responseType = "json";
      request.upload.onprogress = (event) => (this.share = event.lengthComputable ? event.loaded / event.total : 0);
      request.onload = () => this.end(request.status, request.response);
      request.onerror = () => this.end(0, null);
      Object.assign(this, { refusal: "", share: 0 });
      request.send(form);
    },
    end(status, answer) {
      this.share = null;
      if (status === 201) return this.$emit("uploaded", answer.id);
      const words = answer?.detail ?? "the service does not answer; it may be restarting";
      this.refusal = words.charAt(0).toUpperCase() + words.slice(1) + (/[.?!]$/.test(words) ? "" : ".");
    },
    leave() {
      this.request?.abort();
      this.share = null;
      this.$emit("leave");
    },
  },
};
