// A field for a small text file; emits its text, which never leaves the browser by itself.
export default {
  props: { label: String, accept: String },
  emits: ["text"],
  template: `<label class="brim-labelled">{{ label }}<input type="file" :accept="accept" @change="read"></label>`,
  methods: {
    async read(event) {
      const file = event.target.files[0];
      if (file) this.$emit("text", file.size <= 1 << 20 ? await file.text() : "");
    },
  },
};
