/* The symbols that the TensorRT bindings look for when they are imported. Nothing here works: with
   these the bindings can be read, not used. See dump.py. */
#define NOTHING(name) \
    void* name(void) { return 0; }

NOTHING(createInferBuilder_INTERNAL)
NOTHING(createInferRefitter_INTERNAL)
NOTHING(createInferRuntime_INTERNAL)
NOTHING(createNvOnnxParserRefitter_INTERNAL)
NOTHING(createNvOnnxParser_INTERNAL)
NOTHING(getBuilderPluginRegistry)
NOTHING(getNvOnnxParserVersion)
NOTHING(getPluginRegistry)
NOTHING(initLibNvInferPlugins)
